"""A report for people: as a table for the terminal, and as a page.

tables    figures and names in readable form, tables         findings  what a reader should know first
page      which sections a page has, in order                sections  charts, tables and sentences
html      elements, with everything from outside escaped     style.css
"""

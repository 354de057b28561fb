"""Shows a report as a table in the terminal and as an HTML page.

tables    formats figures and names; tables              findings  sentences about what needs attention
page      the sections of a page and their order         sections  charts, tables and sentences of a section
html      HTML elements with escaped text                style.css
"""

"""A report as one self-contained HTML page: without scripts, fonts or external addresses, so it can be mailed,
archived, and opened on a phone or without a network.

pages     which sections a page has, in order       html      elements, with everything from outside escaped
texts     sections of sentences                     findings  what a reader should know first
layers    sections on layers                        style     the style sheet, light and dark
tensors   sections on what was seen of tensors      heat, bars, curve, ../charts.py   drawings as inline SVG

A section is one function. A page is drawn only from the contents of calibration.json.
"""

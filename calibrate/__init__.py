"""Sample data -> amax histories -> scales. Installed as `fp8serve.calibration`.

data       which token sequences are read        observe    what was seen of every tensor, and the scales from it
passes     forward, backward, hooks              compare    high precision and FP8 side by side
measure    perplexity, KL, SQNR, saturation      pipeline   calibrate(): a directory in, an FP8 directory out
evaluate   evaluate(): how good a directory is   result     what a report holds
grid       where values land on E4M3             generated  what a model says before and after
page/      a report as a page                    report     as a table for the terminal
"""

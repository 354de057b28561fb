"""Sample data -> amax histories -> scales. Installed as `fp8serve.calibration`.

data       which token sequences are read        observe    what was seen of every tensor, and the scales from it
passes     forward, backward, hooks              compare    high precision and FP8 side by side
measure    perplexity, KL, SQNR, saturation      pipeline   calibrate(): a directory in, an FP8 directory out
evaluate   evaluate(): how good a directory is   report     the page and the tables; charts draws, result holds
layerwise  one layer over all batches            ranks      several processes, with the bits of one
unfinished what a killed run goes on from        recorded   what was seen, as a file holds it
"""

"""Sample data -> amax histories -> scales. Installed as `fp8serve.calibration`.

pipeline   calibrate(): a directory in, an FP8 directory out      job        a calibration under way, and its judges
checks     what cannot be done                                    output     the directory that is written
data       which token sequences are read                         observe    what was seen of every tensor, and scales
passes     forward, backward, hooks, layer by layer               compare    high precision and FP8 side by side
measure    perplexity, KL, SQNR, saturation, outliers             embedding  results of models that embed
techniques what may be done to the model                          unfinished results kept for --resume
evaluate   evaluate(): how good a directory is                    result     what a report holds
generated  what a model says before and after                     reports/   a report as a table and as a page
"""

"""Sample data -> amax histories -> scales. Installed as `fp8serve.calibration`.

pipeline   calibrate(): a directory in, an FP8 directory out      job        a calibration under way
refused    what cannot be asked for                               written    the directory that is left
data       which token sequences are read                         observe    what was seen of every tensor, and scales
passes     forward, backward, hooks                               layerwise  one layer over all batches
methods    what may be done to the model: input_scales, precision (what stays in BF16), healing
smoothing  channels of inputs evened out                          pairs      what makes channels, and what reads them
rounding   weights rounded layer by layer, by gptq                unfinished results kept for --resume
ranks      several processes that calibrate together              compare    high precision and FP8 side by side
measure    perplexity, KL, SQNR, saturation                       sensitivity  what each layer costs
evaluate   evaluate(): how good a directory is                    result     what a report holds
outliers   channels far from the others                           grid       where values land on E4M3
generated  what a model says before and after                     report     as a table for the terminal
heap       freed memory returned to the system
page/      a report as a page
"""

"""Calibration: from sample data to amax histories, scales and an FP8 directory. Installed as `fp8serve.calibration`.

pipeline     calibrate(): reads a model directory, writes an FP8 directory   job            a running calibration
checks       refuses options that cannot be used                             stage_results  results stored for --resume
data         selects the token sequences                                     output         writes the FP8 directory
passes       forward and backward passes, forward hooks                      result         dataclasses of a report
observe      records amaxes and computes scales                              reports/       reports as tables and HTML
measure      perplexity, KL divergence, SQNR, saturation, outlier channels   embedding      results of embedding models
compare      compares the model in high precision with the model in FP8      generated      text before and after
techniques/  optional methods that reduce the error of FP8                   evaluate       evaluate()
"""

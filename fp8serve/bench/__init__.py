"""Studies and measurements that print their figures with the machine, the versions and the commit that made them.

numerics       the three below, and a model for them      training    five recipes, one model, one seed
quantization   E4M3, E5M2 and INT8 on one tensor          corpus      text that every Python carries
layers         the recipes on every linear of a model     plot        curves as a standalone SVG
spikes         delayed scaling when a tensor jumps        provenance  where figures come from
quality        every method of calibration, peers         documents   two models, document by document
accumulation   products of many terms                    quality_peers  models of other tools
arms           short trainings, alike but for the recipe  parts          current scaling, part by part
jumps          activations that jump while a model trains
"""

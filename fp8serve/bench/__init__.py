"""Studies and measurements that print their figures with the machine, the versions and the commit that made them.

provenance   where figures come from            plot       curves as a standalone SVG
corpus       text that every Python carries     training   five recipes, one model, one seed
"""

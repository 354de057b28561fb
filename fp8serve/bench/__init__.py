"""Measurements of speed and of bits, with the machine, the versions and the commit that made them: `fp8serve bench`."""

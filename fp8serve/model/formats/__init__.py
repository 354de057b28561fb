"""How projects store FP8 and other small numbers in their files, and the conversion to our conventions."""

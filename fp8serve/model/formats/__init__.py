"""How projects spell FP8 and other small numbers in their files, and what that means in our conventions."""

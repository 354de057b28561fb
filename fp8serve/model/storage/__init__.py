"""Files of model directories: opened without following links out of them, memory-mapped, and written atomically."""

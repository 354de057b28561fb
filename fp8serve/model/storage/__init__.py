"""Files of model directories: opened without following foreign links, memory-mapped, and written atomically."""

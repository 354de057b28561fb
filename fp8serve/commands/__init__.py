"""The commands, one module each: options in, one function of another room called, a summary or JSON out."""

"""Files and directories of a model: read without trust, mapped into memory, written whole or not at all."""

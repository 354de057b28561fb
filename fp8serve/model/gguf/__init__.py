"""GGUF, the one-file format of llama.cpp, converted into a Hugging Face directory: `convert` is the entry.

`reader` opens a file and refuses a damaged one, `families` is the table of architectures, `model` has hyper-parameters
and weights in the form of a directory, `tokenizer` builds tokenizer.json, and `conversion` converts a file with all of
these, once. `writing` converts in the other direction.
"""

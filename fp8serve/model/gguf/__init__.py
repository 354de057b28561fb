"""GGUF, the one-file format of llama.cpp, converted into a Hugging Face directory: `convert` is the entry.

`reader` opens a file and refuses a damaged one, `families` is the table of architectures, `config` writes
hyper-parameters in the form of config.json, `tensors` gives the weights their Hugging Face names and layout,
`tokenizer` builds tokenizer.json, and `conversion` converts a file with all of these, once. `writing` converts in the
other direction.
"""

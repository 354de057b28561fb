"""GGUF, the one-file format of llama.cpp, converted into a Hugging Face directory: `convert` is the entry.

`reader` opens a file and refuses a damaged one, `families` is the table of architectures, `config` and `derived` write
hyper-parameters in the form of config.json, `tensors` gives the weights their Hugging Face names and layout, `numbers`
dequantizes them, `tokenizer` and `pretokenizers` build tokenizer.json, `conversion` converts a file with all of these,
`cache` converts each file once, and `smollm2` finds a model that comes in a Python package. `writing` and `vocabulary`
convert in the other direction.
"""

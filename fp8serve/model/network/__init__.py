"""The PyTorch modules: the decoder, the encoder, and the modules of their layers."""

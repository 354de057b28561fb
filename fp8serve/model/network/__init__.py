"""The modules: the decoder, the encoder, and the parts of their layers."""

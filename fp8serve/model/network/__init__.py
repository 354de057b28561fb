"""The modules: the decoder and the encoder, and what their layers are made of."""

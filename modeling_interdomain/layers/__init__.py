"""Small modules that mixers and models share: norms, convolutions, feature maps, rotary embeddings."""

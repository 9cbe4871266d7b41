"""Models that transformers' own code computes, with the attention and the paged cache of specbatch."""

"""The tables of GPipe's and torchgpipe's papers, remade: ``make papers``."""

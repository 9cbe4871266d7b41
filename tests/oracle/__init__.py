"""The plain, slow engine with which tests compare specbatch. It computes one request's decisions in host Python."""

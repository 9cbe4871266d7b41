"""The plain, slow engine that tests compare the product with. It computes one request's decisions in host Python."""

"""What `moesaic profile` measures on this machine: links, host, products, and the layers that its fits are checked on."""

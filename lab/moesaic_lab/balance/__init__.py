"""`moesaic bench balance`: compares methods for skewed routing on an emulated cluster, with virtual
compute."""

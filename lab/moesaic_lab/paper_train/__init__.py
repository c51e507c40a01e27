"""`moesaic bench paper-train`: trains the papers' models that are no decoders, by the loop of
`moesaic train`."""

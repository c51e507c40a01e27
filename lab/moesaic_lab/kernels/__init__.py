"""Operations of a layer, beside the plain way to write them and beside the roofline."""

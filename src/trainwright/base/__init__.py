"""The words of the library: records, spans, contracts, names, errors. Torch and the standard library only."""

"""The words of the library: records, spans, plan, contracts, names, errors. Torch and the standard library only."""

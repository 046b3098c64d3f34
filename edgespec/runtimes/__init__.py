"""Who computes: one file per engine, one contract."""

"""Who computes: one folder per engine, one contract."""

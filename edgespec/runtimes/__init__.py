"""The engines that compute: one folder per runtime, one contract."""

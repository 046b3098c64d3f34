"""ONNX Runtime as a runtime."""

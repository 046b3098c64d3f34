"""ONNX graphs, written without PyTorch."""

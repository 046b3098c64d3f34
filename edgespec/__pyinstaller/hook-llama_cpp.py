"""What PyInstaller misses in llama-cpp-python: it loads llama.cpp's libraries by a computed path."""

from PyInstaller.utils.hooks import collect_dynamic_libs

binaries = collect_dynamic_libs("llama_cpp")

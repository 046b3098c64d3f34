"""Tests on a second device: llama.cpp's Vulkan backend, on a graphics card or in software (docs/vulkan.md)."""

"""What PyInstaller misses in edgespec: modules imported by name, the kernels' library, data files, versions."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec

from PyInstaller.utils.hooks import collect_data_files, collect_dynamic_libs, collect_submodules, copy_metadata

from edgespec.runtimes.onnx.providers import distribution_of, installed_plugins

# The commands and the modules that only commands use, which an application does not need.
LEFT_OUT = ("edgespec.__main__", "edgespec.__pyinstaller", "edgespec.bench", "edgespec.cli", "edgespec.export")

hiddenimports = collect_submodules("edgespec", filter=lambda name: not name.startswith(LEFT_OUT))
binaries = collect_dynamic_libs("edgespec")
datas = collect_data_files("edgespec", includes=["**/*.toml", "**/*.html", "**/*.txt", "**/*.sha256"])

if find_spec("onnxruntime") is not None:
    hiddenimports.append("onnxruntime")  # PyInstaller knows its libraries
    for plugin in installed_plugins():
        hiddenimports.append(plugin)
        binaries += collect_dynamic_libs(plugin)
        with suppress(PackageNotFoundError):
            datas += copy_metadata(distribution_of(plugin))

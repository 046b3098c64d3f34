"""What PyInstaller misses in edgespec: modules imported by name, the kernels' library, data files, versions."""

from PyInstaller.utils.hooks import collect_data_files, collect_dynamic_libs, collect_submodules

# The commands and the modules that only commands use, which an application does not need.
LEFT_OUT = ("edgespec.__main__", "edgespec.__pyinstaller", "edgespec.bench", "edgespec.cli", "edgespec.export")

hiddenimports = collect_submodules("edgespec", filter=lambda name: not name.startswith(LEFT_OUT))
binaries = collect_dynamic_libs("edgespec")
datas = collect_data_files("edgespec", includes=["**/*.toml", "**/*.html", "**/*.txt"])

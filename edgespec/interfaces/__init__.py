"""What runtimes, drafters and depth policies implement. Records and protocols only."""

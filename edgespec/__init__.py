"""edgespec"""

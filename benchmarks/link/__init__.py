"""Hosts on thin links, for benchmarks: namespaces, counters, traced processes, figures."""

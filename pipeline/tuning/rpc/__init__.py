"""Measuring on boards, through the tracker and the servers of TVM's RPC."""

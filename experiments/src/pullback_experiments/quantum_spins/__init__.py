"""Neural quantum states: records of `pb.vmc`."""

"""Where host meshes come from, and which process gets which device."""

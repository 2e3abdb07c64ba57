"""What each operation does to scales; importing a module registers its rules."""

"""What people see in terminals and notebooks."""

"""Which of the engines that are left gets a leg: one module for each picker."""

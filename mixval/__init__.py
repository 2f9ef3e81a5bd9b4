"""Value mixup samples and train on the ones that help."""

//! Remedies of errors with files and directories.

use std::io;

/// What a user can do about an error of the system with a file or directory, if that is known.
///
/// ```
/// use std::io;
/// let full = io::Error::from(io::ErrorKind::StorageFull);
/// assert!(errors::files::remedy(&full).unwrap().starts_with("Free space"));
/// assert_eq!(errors::files::remedy(&io::Error::other("unknown")), None);
/// ```
#[must_use]
pub fn remedy(error: &io::Error) -> Option<&'static str> {
    match error.kind() {
        io::ErrorKind::NotFound => Some("Create the directory first"),
        io::ErrorKind::NotADirectory => Some("Name a directory"),
        io::ErrorKind::PermissionDenied => {
            Some("Let this user write there, or choose another directory")
        }
        io::ErrorKind::ReadOnlyFilesystem => {
            Some("Its file system is read-only: choose another directory")
        }
        io::ErrorKind::StorageFull => {
            Some("Free space or inodes on its file system (df, df -i), or choose another directory")
        }
        io::ErrorKind::QuotaExceeded => {
            Some("Free space of this user there, or choose another directory")
        }
        _ => None,
    }
}

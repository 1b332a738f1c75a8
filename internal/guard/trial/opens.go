package trial

// ByOpens are the rows of Matrix and Reads that are denied where opens wait and no hook is asked.
var ByOpens = map[string]bool{
	"open-write": true, "open-append": true, "open-read-write": true, "open-read-only-truncating": true, "io_uring-open-write": true,
	"io_uring-poller-open-write": true, "symbolic-link": true, "hard-link-from-before": true, "reopen-by-proc": true, "bind-mount": true,
	"bind-mount-of-folder-above": true, "chroot": true, "open_tree-clone": true, "open_by_handle_at": true, CreateRow: true, "write-the-program": true,

	"read": true, "read-below": true, "read-to-write": true, "list-folder": true, "io_uring-open-read": true, "map-to-read": true,
	"read-symbolic-link": true, "read-hard-link-from-before": true, "read-new-hard-link": true, "read-after-rename": true,
	"read-after-rename-of-folder": true, "read-bind-mount-in-another-namespace": true, "read-bind-mount-of-folder-above": true, "read-chroot": true,
	"read-open_tree-clone": true, "read-open_by_handle_at": true, "read-by-root-of-a-process": true, "read-reopened-by-proc": true,
	LowerRow: true,
}

// LowerRow passes on Linux 6.1, where an overlay opens the file of its layer without an event; on 6.12 and 6.18 it is denied.
const LowerRow = "read-lower-layer-of-overlay"

// CreateRow is refused as a write, when the file is there already: it stays, empty.
const CreateRow = "create"

package xsk

import "fmt"

// owner names the owner of a frame. Only a checked queue keeps it.
type owner uint8

const (
	ownerKernel  owner = iota // in the fill ring, the kernel, or the receive ring unread
	ownerProgram              // between Recv or Reserve and Release or Send
	ownerFree                 // for Reserve to hand out
	ownerSending              // in the transmit ring, the kernel, or the completion ring unread
)

func (o owner) String() string {
	switch o {
	case ownerKernel:
		return "the kernel, which receives into it"
	case ownerProgram:
		return "the program"
	case ownerFree:
		return "nobody: it is free"
	case ownerSending:
		return "the kernel, which sends it"
	}
	return fmt.Sprintf("owner %d", uint8(o))
}

// OwnershipError is the value with which a checked queue panics: the program gave a frame that it did not
// have. A second Release of the same frame is the usual cause.
type OwnershipError struct {
	Operation string // "release", "send" …
	Frame     uint32 // its number in the queue's memory
	Owner     string // the owner
	Wanted    string // the owner that the operation needs
}

func (e *OwnershipError) Error() string {
	return fmt.Sprintf("xsk: %s frame %d: its owner is %s, not %s", e.Operation, e.Frame, e.Owner, e.Wanted)
}

// owners has the owner of each frame; nil in a queue that is not checked.
type owners []owner

func newOwners(l Layout) owners {
	o := make(owners, l.ReceiveFrames+l.TransmitFrames)
	for i := l.ReceiveFrames; i < uint32(len(o)); i++ {
		o[i] = ownerFree
	}
	return o
}

// move passes a frame on, and panics if from does not own it.
func (o owners) move(operation string, frame uint32, from, to owner) {
	if o == nil {
		return
	}
	if o[frame] != from {
		panic(&OwnershipError{operation, frame, o[frame].String(), from.String()})
	}
	o[frame] = to
}

// Package lasting ends tools by themselves.
package lasting

import (
	"context"
	"time"
)

// For ends the context after the duration; 0: never. Tools call it when their sensors are attached, which may take
// longer than they are to watch.
func For(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if d == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, d)
}
